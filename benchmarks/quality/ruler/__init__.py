"""The tasks of RULER for any tokenizer, made offline.

After Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (2024), whose task
definitions, questions and score these are (NVIDIA/RULER, Apache-2.0); the code and the words are our own. Differences:
words are made of syllables; the essays are Markov text of such words, so tasks in essays are *not RULER-essay*; every
sample has a seed of its own, a hash of task, length and index, so a run can be cut in parts; haystacks grow in finer
steps, so prompts are fuller; tasks are in the order in which they tell methods apart best (constant noise makes a
needle stand out by itself). The qa tasks need data sets and are left out.
"""
from torchsparsekv_benchmarks.quality.ruler.fit import TASKS, Ruler

__all__ = ["TASKS", "Ruler"]
