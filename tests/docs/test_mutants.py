"""Mutants: each change is one of the source, outside of messages, and is put where its function is known by."""

from benchmarks.mutants.points import points
from tests.support.tables import for_each

SOURCE = '''
LIMIT = 3


class Saver:
    @property
    def due(self):
        """Whether 1 < 2."""
        {}
'''


@for_each(
    ("self.a < b", ["(self.a <= b)"]),
    ("x = a and not b", ["x = (a or not b)", "x = a and bool(b)"]),
    ("x = a + 1", ["x = (a - 1)", "x = a + 2"]),
    ("x = True", ["x = False"]),
    ("self.save()", ["pass"]),
    ("return {'ä': 2}", ["return None", "return {'ä': 3}"]),
    ("if self.ok: x", ["if (not self.ok): x"]),
    ("return None", []),
    ("logger.info('%d', 1)", []),
    ("raise ValueError(f'{1}')", []),
)
def test_each_change_is_one_of_what_the_program_does(line, changed):
    source = SOURCE.format(line)
    found = points("saver.py", source)
    assert sorted(point.changed(source) for point in found) == sorted(SOURCE.format(text) for text in changed)
    assert {point.function for point in found} <= {6}
