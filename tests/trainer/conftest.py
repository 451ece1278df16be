"""Makes the doubles beside it importable by the tests in the folders below."""
