-- expire: requests are empty; answers how many leases had run out, to the first who asks.

return answer_each(give_up_overdue)
