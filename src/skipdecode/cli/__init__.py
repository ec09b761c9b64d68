"""The command line: it parses arguments and prints results; all other code is in other packages."""
