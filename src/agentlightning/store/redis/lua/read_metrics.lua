-- At most `limit` metrics of `run` after number `after`, then what was undone; an error where there is no such run and
-- `exists` says that it matters.

if asked.exists and call('EXISTS', store .. 'run:' .. asked.run) == 0 then return no_such_run(asked.run) end
return {
  call('XRANGE', store .. 'metrics:' .. asked.run, '(' .. asked.after .. '-0', '+', 'COUNT', asked.limit),
  call('LRANGE', store .. 'undone:' .. asked.run, 0, -1),
}
