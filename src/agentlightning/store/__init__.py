"""The store: what is durable. base.py has the methods, open.py the door; sql, redis and client.py are behind it."""
