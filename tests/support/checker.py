"""The type checker that the import hook applies to the losses: beartype, for which an int is a float."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
