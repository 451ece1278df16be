-- expire: requests {until_ns}, '' for no limit; answers how many leases had run out, to the first who asks, or 0 where it is
-- later than that.

return answer_each(function(request)
  if request.until_ns ~= '' and before(request.until_ns, now) then return 0 end
  return give_up_overdue()
end)
