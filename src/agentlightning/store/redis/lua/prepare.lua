-- prepare: request {version, secret}; answers {the version of what is stored, its secret}. A new store gets those given.

return answer_each(function(request)
  call('HSETNX', store .. 'meta', 'schema_version', request.version)
  call('HSETNX', store .. 'meta', 'signing_secret', request.secret)
  return call('HMGET', store .. 'meta', 'schema_version', 'signing_secret')
end)
