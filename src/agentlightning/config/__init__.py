"""Settings of every part, a file per group of tables, read from TOML, the command line or Python."""
