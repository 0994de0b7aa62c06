-- Whether a subscription is being applied at this moment, and when its primary was last heard of.
select count(*) filter (where s.pid is not null) as workers, max(s.last_msg_receipt_time) as heard_at
from pg_stat_subscription s
where s.subid = $1
