"""The type checker that tests put around every function: beartype, with ints where floats are asked for (PEP 484)."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
