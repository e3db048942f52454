"""Planners: functions from document lengths to a checked plan.

    registry.PLANNERS[name](lengths, cost, options)       one replica's plan (a PlannedReplica)
    replicas.plan_step(lengths, cost, options, name, n)   one plan for each of n balanced replicas
    replicas.evaluation_step(lengths, cost, options, n)   forward-only plans of n replicas

A plan is a pure function of these arguments: time and random numbers do not affect it. Another
order of the documents only changes their indices in the plan.
"""
