"""Options of commands, in groups: each group is a frozen dataclass, and a panel of --help.

The dataclass may be the one that the work itself takes: its fields hold their help texts, and
`panel` is the title of the panel, in place of the docstring.
"""

import inspect
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Annotated, Any, ClassVar, get_type_hints

from typer import Abort, BadParameter, Exit, Option, Typer, echo
from typer.core import TyperCommand, TyperGroup

_WrongWords: Any = BadParameter.__mro__[1]  # click's UsageError, wherever typer has click from


def _as_given(value: Any) -> Any:
    return value


def flag(
    default: Any, text: str, *names: str, typed: Any = None, read: Any = _as_given, **more: Any
) -> Any:
    """A field that becomes an option; `default` MISSING: it must be given.

    typed   type on the command line, if that is not the field's type
    read    converts it, and `default`, to the field's value
    """
    metadata = {"option": Option(*names, help=text, **more), "given": (typed, default, read)}
    return field(default=read(default), metadata=metadata)


def several(text: str, *names: str, of: Any = str) -> Any:
    """A field for an option that may be given several times: a tuple of strings, each an `of`."""
    return flag(
        None, text, *names, typed=list[of] | None, show_default=False,
        read=lambda given: tuple(map(str, given or ())),
    )  # fmt: skip


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each field of the records that it takes."""
    annotated: Any = Annotated  # its arguments are known only at run time
    parameters, records = [], dict[str, Any]()
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        record = parameter.annotation
        if not is_dataclass(record):
            parameters.append(parameter)
            continue
        records[parameter.name], hints = record, get_type_hints(record)
        title = getattr(record, "panel", None) or (record.__doc__ or "").rstrip(".")
        for each in _options(record):
            option = copy(each.metadata["option"])
            option.rich_help_panel = title
            typed, default, _ = each.metadata["given"]
            default = inspect.Parameter.empty if default is MISSING else default
            hint = annotated[typed or hints[each.name], option]
            parameters.append(parameter.replace(name=each.name, annotation=hint, default=default))

    def construct(**given: Any) -> None:
        made = {
            name: record(
                **{
                    each.name: each.metadata["given"][2](given.pop(each.name))
                    for each in _options(record)
                }
            )
            for name, record in records.items()
        }
        command(**given, **made)

    kind = inspect.Parameter.KEYWORD_ONLY
    run: Any = construct  # typer reads these of it
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature([p.replace(kind=kind) for p in parameters])
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    made: Callable[..., None] = run
    return made


def command_group(kind: type["OneLineErrors"], purpose: str, version: str) -> Typer:
    """A group of commands, with `--version`; its help is plain text, for logs too."""
    app = Typer(
        cls=kind, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
        help=purpose,
    )  # fmt: skip

    def show(asked: bool) -> None:
        if asked:
            echo(version)
            raise Exit

    option = Option("--version", callback=show, is_eager=True, help="print the version, and exit")

    def of_all(version: Annotated[bool, option] = False) -> None:
        del version  # its callback has done everything

    app.callback()(of_all)
    return app


def run_app(app: Typer, name: str) -> None:
    """Run the command line `name` to its exit; wrong arguments are reported in one line."""
    try:
        sys.exit(app(prog_name=name, standalone_mode=False))
    except _WrongWords as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            path = name if error.ctx is None else error.ctx.command_path
            said = " ".join(error.format_message().split()).rstrip(".")
            sys.stderr.write(f"error: {path}: {said}; see: {path} --help\n")
        sys.exit(2)
    except Abort:
        sys.exit(130)  # Ctrl-C, as of a shell


def _options(record: Any) -> list[Field[Any]]:
    """Fields that are on the command line; others have their defaults."""
    return [each for each in fields(record) if "option" in each.metadata]


class Panels(TyperCommand):
    """A command whose help lists options panel by panel, in plain text: it goes to logs too."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                panel = getattr(parameter, "rich_help_panel", None) or "Options"
                panels.setdefault(panel, []).append(record)
        for name, records in panels.items():
            with formatter.section(name):
                formatter.write_dl(records)


class OneLineErrors(TyperGroup):
    """Commands that report expected errors in one line, and exit with code 2."""

    expected: ClassVar[tuple[type[Exception], ...]]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except self.expected as error:
            sys.stderr.write(f"error: {self.line(error)}\n")
            raise Exit(2) from error

    @classmethod
    def line(cls, error: Exception) -> str:
        return " ".join(str(error).split())
