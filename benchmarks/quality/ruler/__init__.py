"""The tasks of RULER for any tokenizer, made offline.

The task definitions, questions and score are those of Hsieh et al., "RULER: What's the Real Context Size of Your
Long-Context Language Models?" (2024; NVIDIA/RULER, Apache-2.0). The code and the words are our own. Differences:

- Words are made of syllables.
- The essays are Markov text of such words, so tasks in essays are *not RULER-essay*.
- Every sample has a seed of its own, a hash of task, length and index. So a run can be cut in parts.
- Haystacks grow in finer steps, so prompts are fuller.
- The tasks that separate methods best come first. In constant noise a needle stands out by itself.
- The qa tasks need data sets and are left out.
"""
from torchsparsekv_benchmarks.quality.ruler.fit import TASKS, Ruler

__all__ = ["TASKS", "Ruler"]
