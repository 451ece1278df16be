"""The store on Redis: one Lua script per method."""
