"""The reader of MovieLens-100k, on a file of its format."""

import numpy as np
from benchmarks.data.movielens import read

HEADER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
ROWS = [(7, 30, 3, 4), (7, 10, 1, 1), (9, 10, 5, 9), (7, 20, 2, 3), (9, 20, 4, 8), (9, 30, 4, 7)]


def test_the_last_film_is_test_and_the_one_before_is_dev(tmp_path):
    file = tmp_path / "ml-100k.inter"
    lines = "".join("\t".join(map(str, row)) + "\n" for row in ROWS)
    file.write_text(HEADER + lines, encoding="utf-8")

    found = read(file)

    np.testing.assert_array_equal(found.train, [[0, 0], [1, 2]])
    np.testing.assert_array_equal(found.dev, [1, 1])
    np.testing.assert_array_equal(found.test, [2, 0])
    assert found.num_films == 3
