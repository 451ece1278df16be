"""The command line; `app.py` puts the commands together."""
