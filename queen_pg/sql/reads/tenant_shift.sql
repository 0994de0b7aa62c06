-- By how much ids that arrive are raised: past all that were ever given out here.
select greatest((select last_value from queen.queues_id_seq), (select last_value from queen.partitions_id_seq),
                (select last_value from queen.consumer_groups_id_seq))
