-- Keep a primary whose epoch is over from taking writes; whether it still did.
select queen._fence($1)
