-- What a slot keeps, whole transactions in the order of their commits, until there are so many changes.
select p.data
from pg_logical_slot_peek_binary_changes($1, null, $2, 'proto_version', '1', 'publication_names', $3) p
