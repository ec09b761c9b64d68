"""``python -m skipdecode``."""

from .cli.app import main

main()
