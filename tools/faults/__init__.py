"""A daemon and trainers that faults befall, and what must hold afterwards."""
