"""``python -m skipdecode``."""

from .cli.main import main

main()
