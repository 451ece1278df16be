"""The store on Redis: one Lua script a verb."""
