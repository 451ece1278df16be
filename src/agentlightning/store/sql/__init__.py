"""The stores of SQL databases: one layer over SQLAlchemy Core, and what SQLite and PostgreSQL do each in their own way."""
