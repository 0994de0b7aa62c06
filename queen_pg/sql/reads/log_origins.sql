-- The steps that a slot keeps: their beginnings, whence they came, and their ends (pgoutput's B, O and C).
select p.data
from pg_logical_slot_peek_binary_changes($1, null, null, 'proto_version', '1', 'publication_names', $2) p
where get_byte(p.data, 0) in (66, 67, 79)
