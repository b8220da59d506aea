"""Thin commands: they parse, call one room below, and print. Heavy imports happen inside the commands."""
