"""Skeleton of thought: first the points of an answer in short, then all points written out in parallel.

    | question | 1. ... 2. ... 3. ... 4. ... |  skeleton, generated one after another
                                             | write out point 1
                                             | write out point 2     four forks over question and skeleton
                                             | write out point 3
                                             | write out point 4

What the paper's frontend gains here is time: four paragraphs of n tokens take the time of one.  The forks share all
of the skeleton.
"""

from __future__ import annotations

import minisgl as sgl

from ..facts import items
from ..programs import Programs, Setting, programs

POINTS = 4
TOPICS = items("""
    how to sleep well, how to learn a language, how to save water at home, how to plan a garden, how to train a dog,
    how to bake bread, how to prepare for an exam, how to choose a bicycle, how to calm a crying baby, how to paint a
    room, how to give a good talk, how to keep bees, how to read a map, how to pack for a journey, how to repair a tap,
    how to stay healthy in winter, how to make new friends in a town, how to write a letter of thanks, how to clean a
    window, how to look after a cactus
""")
INTRODUCTION = (
    "You write short guides. A guide has a skeleton of four points, each of a few words, and then a paragraph for "
    "each point. The points do not repeat each other and go from the most important to the least important. The "
    "paragraphs are friendly and practical and name one example each.\n\nGuide: "
)


@sgl.function
def skeleton_of_thought(s, topic, tokens):
    s += INTRODUCTION + topic + "\nSkeleton:\n"
    for i in range(1, POINTS + 1):
        s += f"{i}." + sgl.gen(f"point {i}", max_tokens=8, stop="\n") + "\n"
    forks = s.fork(POINTS)
    for i, fork in enumerate(forks, 1):
        fork += f"\nParagraph for point {i}:" + sgl.gen("paragraph", max_tokens=tokens, ignore_eos=True)
    forks.join()
    return [s[f"point {i}"] for i in range(1, POINTS + 1)] + list(s["paragraph"])


@programs("sot", "skeleton of thought: points in turn, then paragraphs in parallel over one prefix")
def build(setting: Setting) -> Programs:
    topics = list(TOPICS)
    setting.rng(0).shuffle(topics)
    count = setting.count(gpu=64, cpu=8, quick=3)
    tokens = 128 if setting.on_gpu else 24 if setting.quick else 48
    chosen = [topics[i % len(topics)] for i in range(count)]
    return Programs(skeleton_of_thought, [{"topic": _again(t, i, len(topics)), "tokens": tokens}
                                          for i, t in enumerate(chosen)])  # fmt: skip


def _again(topic: str, i: int, n: int) -> str:
    """Beyond the list's end the topics come again for other readers, so that no two guides are the same."""
    return topic if i < n else f"{topic}, for readers of volume {i // n + 1}"
