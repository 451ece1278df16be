"""The store: what is durable. base.py has the methods, open.py opens one; sql, redis and client.py are behind it."""
