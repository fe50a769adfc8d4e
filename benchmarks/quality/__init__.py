"""What a budget costs in answers: tasks x lengths x methods x budgets, the same samples for every method."""
