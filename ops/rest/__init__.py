"""The rest: an estimate of the tokens that a step does not retrieve.

The pool is cut into groups of `Rest.group` rows. The store keeps the sum of the keys and the sum of the values of
every group, divided by `Rest.group`. `group_sums` adds the tokens of a prompt. At a step `append` adds the tokens that
leave the ring, or `group_sums` if the method chooses their pool rows (`Traits.moves_leaving`). Attention takes what
remains of each group as one more token (`remaining` in _remaining.py):

    m_g = tokens of g in the sums - tokens of g that the step attends to exactly
    k_g = (sum of keys   - keys   of the exact tokens) / m_g
    v_g = (sum of values - values of the exact tokens) / m_g
    logit of g = softcap(scale * q.k_g) + log m_g;   -inf if m_g = 0

So a full budget is dense attention, and an empty one is attention to the means of the groups.

A method may make means itself, and say at each step how many tokens each mean stands for (`Rest.tokens`). Attention
subtracts nothing from such means.
"""
