"""The replicated log: a publication of every step, followers that apply it, and who leads.

One commit is one entry: a follower gets a step's rows together and in commit order, or not at all.
What is here runs by an operator's hand (`queen-pg replica`, `failover`, `log`); brokers only follow
(`queen_pg.leader`).
"""
