"""Draws where a checkpoint is: the processes of a node, the tiers, and the ways between them.

    python -m docs_site.pictures.concepts    # writes docs/images/concepts.svg

All words are those of the glossary; a word that it does not have is refused.
"""

import sys
from pathlib import Path

from benchmarks.harness.drawing import Drawing, word

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/images/concepts.svg"


def draw() -> str:
    """The picture: a node on the left, durable tiers on the right, the memory of other nodes below."""
    drawing = Drawing(880, 452, "Processes of a node, tiers, and the ways of a checkpoint between them")
    nodes(drawing)
    tiers(drawing)
    ways(drawing)
    return drawing.svg()


def nodes(drawing: Drawing) -> None:
    drawing.box(16, 16, 500, 340, "box")
    drawing.text(28, 36, "node", "strong")
    for rank, x in enumerate((40, 210)):
        drawing.box(x, 52, 150, 60, "work")
        drawing.text(x + 75, 77, f"{word('worker')} {rank}", "strong middle")
        drawing.text(x + 75, 97, "model, optimizer", "small middle")
    drawing.box(380, 52, 120, 128, "pause")
    drawing.text(440, 77, word("agent"), "strong middle")
    drawing.text(440, 97, "starts, watches,", "small middle")
    drawing.text(440, 113, "restarts", "small middle")
    drawing.box(394, 126, 92, 44, "box")
    drawing.text(440, 146, word("saver"), "strong middle")
    drawing.text(440, 162, "owns memory", "small middle")
    drawing.box(40, 200, 460, 112, "memory")
    drawing.text(52, 220, "memory", "strong")
    drawing.text(488, 220, f"{word('arena')}: a tmpfs directory", "small end")
    slots = [("step 41", "older"), ("step 42", "newest commit"), ("step 43", "being written")]
    for number, (step, state) in enumerate(slots):
        x = 56 + 146 * number
        drawing.box(x, 232, 134, 66, "box")
        drawing.text(x + 67, 251, f"{word('slot')} {number}", "small middle")
        drawing.text(x + 67, 269, step, "strong middle")
        drawing.text(x + 67, 287, state, "small middle")
    drawing.text(40, 334, "outlives workers, and the agent until the next launch", "small")
    drawing.box(16, 384, 500, 52, "box")
    drawing.text(28, 406, f"memory of a {word('peer')}", "strong")
    drawing.text(28, 425, "what another node holds of the same step, for a fresh host", "small")


def tiers(drawing: Drawing) -> None:
    for y, name, what, files, outlives in (
        (190, "storage", "a directory", ["checkpoint-20", "checkpoint-40"], "outlives the node"),
        (346, "remote", "a URL", ["checkpoint-20"], "outlives the storage"),
    ):
        drawing.box(664, y, 200, 90, "storage")
        drawing.text(676, y + 20, name, "strong")
        drawing.text(852, y + 20, what, "small end")
        for number, file in enumerate(files):
            drawing.text(676, y + 42 + 18 * number, f"{file}/ + {word('manifest')}", "small")
        drawing.text(676, y + 78, f"{word('durable')}: {outlives}", "small")
    for number, line in enumerate(
        (
            f"Each {word('tier')} holds whole",
            f"{word('checkpoint')}s. A {word('resume')} loads",
            "the newest, from the nearest",
            "tier that has it.",
        )
    ):
        drawing.text(664, 36 + 18 * number, line)


def ways(drawing: Drawing) -> None:
    drawing.arrow([(90, 112), (90, 200)])
    drawing.mark(90, 142, 1)
    drawing.text(104, 147, f"{word('save')}: {word('snapshot')},")
    drawing.text(104, 164, f"then {word('commit')}")
    drawing.arrow([(285, 200), (285, 112)], "line dashed")
    drawing.mark(285, 158, 4)
    drawing.text(299, 163, word("resume"))
    drawing.arrow([(500, 240), (664, 240)])
    drawing.mark(532, 240, 2)
    drawing.text(524, 222, word("persist"))
    drawing.text(548, 260, f"{word('flush')}: when")
    drawing.text(524, 277, "a worker dies, or")
    drawing.text(524, 294, "the job ends")
    drawing.arrow([(764, 280), (764, 346)])
    drawing.mark(764, 308, 3)
    drawing.text(778, 313, word("upload"))
    drawing.arrow([(664, 210), (580, 210), (580, 30), (345, 30), (345, 52)], "line dashed")
    drawing.mark(580, 120, 4)
    drawing.text(594, 125, word("resume"))
    drawing.arrow([(440, 384), (440, 312)], "line dashed")
    drawing.mark(440, 340, 4)


def main() -> int:
    PICTURE.write_text(draw())
    print(f"written to {PICTURE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
