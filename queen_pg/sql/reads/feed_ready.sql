-- What a feed needs: its publication and its slot.
select exists (select from pg_publication p where p.pubname = $2) as publishes,
       exists (select from pg_replication_slots r where r.slot_name = $1) as kept
