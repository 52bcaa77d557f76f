"""Checks of this program on the accelerators of a machine, with a page and a folder of results."""
