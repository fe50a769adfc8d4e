"""What a budget costs in answers: tasks x lengths x methods x budgets, the same samples for every method.

And what it costs in recall, without a model: recall_pariskv.py and recall_digests.py, scripts on structured keys;
static_mass.py and static_codes.py on the queries and keys of a model.
"""
