"""Measurements, run from the checkout, most of them on a GPU; README.md lists the commands."""
