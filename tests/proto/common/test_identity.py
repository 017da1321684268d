"""An identity depends on the weights that are looked at, and on nothing else."""

from expertd.common.identity import (
    changed_identity,
    comparable,
    places,
    sample_of,
    sampled,
    sampled_identity,
    synthetic_identity,
)


def test_few_tensors_are_all_looked_at_and_of_many_sixteen():
    names = [f"t{n:04d}" for n in range(1000)]
    assert sampled(names[:16]) == names[:16]
    found = sampled(reversed(names))
    assert (len(found), found[0], found[-1]) == (16, names[0], names[-1])
    assert found == sorted(set(found))


def test_places_are_inside_and_spread():
    for nbytes in (0, 1, 4096, 4097, 10_000, 1 << 30):
        found = places(nbytes)
        assert all(at >= 0 and at + n <= nbytes for at, n in found)
        assert sum(n for _, n in found) == min(nbytes, 4096)
        assert found[-1][0] + found[-1][1] == nbytes


def sample(data, dtype="BF16", shape=(2, 3)):
    return sample_of(dtype, shape, len(data), lambda at, n: data[at : at + n])


def test_a_sample_is_of_dtype_shape_and_bytes():
    found = [sample(b"a" * 12), sample(b"b" * 12), sample(b"a" * 12, "F16"), sample(b"a" * 12, shape=(3, 2))]
    assert len(set(found)) == 4
    assert sample(b"a" * 12, shape=[2, 3]) == found[0]


def test_kinds_are_not_compared():
    one, other = sampled_identity({"a": b"1", "b": b"2"}), sampled_identity({"a": b"2", "b": b"1"})
    assert one == sampled_identity({"b": b"2", "a": b"1"}) != other
    changed = changed_identity(one, {"a": b"3"})
    assert changed not in {changed_identity(other, {"a": b"3"}), changed_identity(one, {"a": b"4"}), one}
    assert changed_identity("", {"a": b"3"}) == ""
    assert comparable(one, other)
    assert not comparable(one, changed)
    assert not comparable(one, synthetic_identity("f00d"))
    assert not comparable("", "")
    assert not comparable(one, "")
