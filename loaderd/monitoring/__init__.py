"""How a daemon is seen from outside: log, metrics, page, `top` and `doctor`."""
