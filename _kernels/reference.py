"""Slow twins of the kernels, written from the definitions: oracles in tests, never run otherwise.

Same names and the same arguments as the compiled functions, outputs returned instead of written
into arrays that the caller allocated.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise

import numpy as np

IGNORED = -100
_MASK = (1 << 64) - 1


def _place(lengths, capacity, choose, most_segments):
    """Row of each length in turn: `choose` picks an open row that fits, or None."""
    row_of, spaces, touched = [], [], []
    for now, length in enumerate(lengths):
        row = choose(spaces, touched, int(length))
        if row is None:
            row = len(spaces)
            spaces.append(capacity)
            touched.append(now)
        spaces[row] -= int(length)
        touched[row] = now
        row_of.append(row)
        if row_of.count(row) == most_segments:
            spaces[row] = 0  # closed
    return row_of, len(spaces)


def _tightest(spaces, touched, length):
    fitting = [row for row, space in enumerate(spaces) if space >= length]
    return min(fitting, key=lambda row: (spaces[row], -touched[row]), default=None)


def _emptiest(spaces, touched, length):
    row = max(range(len(spaces)), key=lambda row: (spaces[row], touched[row]), default=None)
    return row if row is not None and spaces[row] >= length else None


def _earliest(spaces, touched, length):
    return next((row for row, space in enumerate(spaces) if space >= length), None)


def _latest(spaces, touched, length):
    return len(spaces) - 1 if spaces and spaces[-1] >= length else None


def best_fit(lengths, capacity, most_segments=0):
    return _place(lengths, capacity, _tightest, most_segments)


def worst_fit(lengths, capacity, most_segments=0):
    return _place(lengths, capacity, _emptiest, most_segments)


def first_fit(lengths, capacity, most_segments=0):
    return _place(lengths, capacity, _earliest, most_segments)


def next_fit(lengths, capacity, most_segments=0):
    return _place(lengths, capacity, _latest, most_segments)


def harmonic(lengths, capacity, classes, most_segments=0):
    """Class j < classes: lengths in (capacity/(j+1), capacity/j], j to a row; rest by next fit."""
    row_of, rows, inside = [], 0, {}  # class -> (its open row, documents in it, tokens in it)
    for length in map(int, lengths):
        kind = next((j for j in range(1, classes) if length * (j + 1) > capacity), classes)
        row, documents, tokens = inside.get(kind, (None, 0, 0))
        full = documents == kind if kind < classes else tokens + length > capacity
        if row is None or full or documents == most_segments > 0:
            row, documents, tokens, rows = rows, 0, 0, rows + 1
        inside[kind] = (row, documents + 1, tokens + length)
        row_of.append(row)
    return row_of, rows


def longest_first(lengths):
    return sorted(range(len(lengths)), key=lambda i: (-int(lengths[i]), i))


def group_by_row(row_of, visit, rows):
    """(order, row_offsets) for visited documents and the rows they went to."""
    members = [[] for _ in range(rows)]
    for document, row in zip(visit, row_of, strict=True):
        members[row].append(document)
    order = [document for row in members for document in row]
    return order, np.cumsum([0, *map(len, members)]).tolist()


def best_fit_decreasing(lengths, capacity, most_segments=0):
    """(order, row_offsets, row_tokens, how many have each length)"""
    visit = longest_first(lengths)
    row_of, rows = best_fit([lengths[i] for i in visit], capacity, most_segments)
    order, row_offsets = group_by_row(row_of, visit, rows)
    row_tokens = sum_rows(lengths, order, row_offsets)
    return order, row_offsets, row_tokens, Counter(map(int, lengths))


def mixed_best_fit(lengths, capacity, most_segments=0, look=64):
    """(order, row_offsets, row_tokens, how many have each length)"""
    size, rows = list(map(int, lengths)), []
    left, enough = list(range(len(size))), 2 * sum(size) // max(len(size), 1)

    def longest(space, without=None):
        fitting = [size[i] for i in left if size[i] <= space and i != without]
        return max(fitting, default=0)

    def of_length(length):
        return max(i for i in left if size[i] == length)

    def two(space):
        """What leaves least of the longest that fits, and pairs with one of the next in order."""
        best = (space - longest(space), -1)
        for i in left:
            if i < left[0] + look and size[i] <= space:
                second = longest(space - size[i], without=i)
                if second and space - size[i] - second < best[0]:
                    best = (space - size[i] - second, i)
        return best

    def taken(row, space):
        """The documents that the row takes next, of which the longest that fits is `most`."""
        most, more = longest(space), (most_segments or 1 << 31) - len(row)
        if not row:
            return [of_length(most) if most > capacity // 2 else left[0]]
        if most == space or more == 1:
            return [of_length(most)]
        if space > enough and more != 2:
            return [left[0] if size[left[0]] <= space else of_length(most)]
        least, first = two(space)
        if first < 0:
            return [of_length(most)]
        second = space - size[first] - least
        return [first, max(i for i in left if size[i] == second and i != first)]

    while left:
        row, space = [], capacity
        while longest(space) and len(row) < (most_segments or 1 << 31):
            for document in taken(row, space):
                left.remove(document)
                row.append(document)
                space -= size[document]
        rows.append(row)
    order, row_offsets = [i for row in rows for i in row], np.cumsum([0, *map(len, rows)]).tolist()
    return order, row_offsets, sum_rows(size, order, row_offsets), Counter(size)


def sum_rows(lengths, order, row_offsets):
    return [sum(int(lengths[i]) for i in order[a:b]) for a, b in pairwise(row_offsets)]


def copy_lengths(lengths, max_length):
    """(the lengths, [empty documents, overlong ones, tokens of these])"""
    overlong = [int(length) for length in lengths if length > max_length]
    empty = [length for length in lengths if length == 0]
    return [*map(int, lengths)], [len(empty), len(overlong), sum(overlong)]


def cut_lengths(lengths, max_length, most):
    return [length for _, _, length in _pieces(lengths, max_length, most)]


def locate_pieces(lengths, max_length, most, at_end, first):
    """[(document, begin, start)]"""
    lengths = list(map(int, lengths))
    begins = np.cumsum([first, *lengths]).tolist()
    located = []
    for document, start, length in _pieces(lengths, max_length, most):
        at = lengths[document] - length if at_end and lengths[document] > max_length else start
        located.append((document, begins[document] + at, at))
    return located


def _pieces(lengths, max_length, most):
    """[(document, start, length)]"""
    pieces = []
    for document, total in enumerate(map(int, lengths)):
        of_document = [
            (document, start, min(max_length, total - start))
            for start in range(0, total, max_length)
        ]
        pieces += of_document[:most] if total > max_length else of_document
    return pieces


def mffd(lengths, capacity):
    """All five steps of Johnson and Garey; (order, row_offsets)."""
    left = longest_first(lengths)
    size = [int(length) for length in lengths]
    rows, spaces = [], []

    def put(document, row):
        left.remove(document)
        rows[row].append(document)
        spaces[row] -= size[document]

    def of_class(above, upto):  # longest first; fractions of a row, exact in integers
        return [i for i in left if size[i] * above > capacity and size[i] * upto <= capacity]

    for document in [i for i in left if size[i] * 2 > capacity]:  # 1: large
        rows.append([])
        spaces.append(capacity)
        put(document, len(rows) - 1)
    with_medium = set()
    # 2: the longest medium that fits, unless even the shortest does not
    for row in range(len(rows)):
        fitting = [i for i in of_class(3, 2) if size[i] <= spaces[row]]
        if fitting:
            put(fitting[0], row)
            with_medium.add(row)
    for row in reversed(range(len(rows))):  # 3: two small
        small = of_class(6, 3)
        if row in with_medium or len(small) < 2:
            continue
        if size[small[-1]] + size[small[-2]] <= spaces[row]:
            shortest = min(size[i] for i in small)
            put(next(i for i in small if size[i] == shortest), row)
            put(next(i for i in of_class(6, 3) if size[i] <= spaces[row]), row)
    for row in range(len(rows)):  # 4: whatever fits, longest first
        while fitting := [i for i in left if size[i] <= spaces[row]]:
            put(fitting[0], row)
    row_of, more = first_fit([size[i] for i in left], capacity)  # 5
    members = [
        [document for document, row in zip(left, row_of, strict=True) if row == r]
        for r in range(more)
    ]
    rows += members
    return [i for row in rows for i in row], np.cumsum([0, *map(len, rows)]).tolist()


def splitmix64(state):
    """(next number, next state) of Steele, Lea and Flood's generator."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31), state


def _shuffled(values, state):
    values = list(values)
    for i in range(len(values) - 1, 0, -1):
        number, state = splitmix64(state)
        j = (number >> 32) * (i + 1) >> 32
        values[i], values[j] = values[j], values[i]
    return values, state


def permutation(n, seed):
    return _shuffled(range(n), seed)[0]


def shuffle_plan(order, row_offsets, seed):
    sources, state = _shuffled(range(len(row_offsets) - 1), seed)
    new_order, new_offsets = [], [0]
    for source in sources:
        row, state = _shuffled(order[row_offsets[source] : row_offsets[source + 1]], state)
        new_order += row
        new_offsets.append(len(new_order))
    return new_order, new_offsets


def fill_rows(
    ids, trained, begin, length, order, row_offsets, capacity, pad_id,
    segment_multiple=1,
):  # fmt: skip
    """(input_ids, labels, attention_mask, position_ids, cu_seqlens, cu_seqlens_padded, trained
    tokens), all but the last by row.
    """
    columns = [[], [], [], [], [], []]
    for start, stop in pairwise(row_offsets):
        tokens, labels, mask, positions, boundaries, padded = [], [], [], [], [0], [0]
        for piece in order[start:stop]:
            own = range(begin[piece], begin[piece] + length[piece])
            learned = [ids[at] if trained is None or trained[at] else IGNORED for at in own][1:]
            padding = -length[piece] % segment_multiple
            tokens += [ids[at] for at in own] + [pad_id] * padding
            labels += [IGNORED, *learned] + [IGNORED] * padding
            mask += [1] * length[piece] + [0] * padding
            positions += range(length[piece] + padding)
            boundaries.append(boundaries[-1] + length[piece])
            padded.append(len(tokens))
        padding = capacity - len(tokens)
        row = (
            tokens + [pad_id] * padding, labels + [IGNORED] * padding, mask + [0] * padding,
            positions + list(range(padding)), boundaries, padded,
        )  # fmt: skip
        for column, values in zip(columns, row, strict=True):
            column.append(values)
    count = sum(label != IGNORED for row in columns[1] for label in row)
    return (*columns, count)


def place_pieces(values, begin, length, order, row_offsets, capacity, segment_multiple, zero):
    """Rows of values, each where `fill_rows` puts its token; `zero` elsewhere."""
    nowhere = len(values)
    places, *_ = fill_rows(
        range(nowhere), None, begin, length, order, row_offsets, capacity, nowhere,
        segment_multiple=segment_multiple,
    )  # fmt: skip
    return [[[*values, zero][place] for place in row] for row in places]


def frame_documents(documents, prefix, suffix):
    """Each non-empty list of ids with prefix and suffix, unless it has them there already."""
    framed = []
    for ids in documents:
        before = [] if ids[: len(prefix)] == prefix else prefix
        after = [] if not suffix or ids[-len(suffix) :] == suffix else suffix
        framed.append([*before, *ids, *after] if ids else [])
    return framed


def gather_pieces(ids, begin, length):
    return [token for b, n in zip(begin, length, strict=True) for token in ids[b : b + n]]


def find_pieces(boundaries, segments, directories, lengths, capacity, segment_multiple):
    """The (document, start, length) of each segment of rows, row by row; or (row, reason).

    boundaries and segments, (file, position, start), of each row; directories: (first document,
    how many) of each file; lengths of all documents.
    """
    found = []
    for row, (edges, references) in enumerate(zip(boundaries, segments, strict=True)):
        if not edges or edges[0] != 0:
            return row, 1
        if len(references) != len(edges) - 1:
            return row, 2
        pieces, used = [], 0
        for (start, stop), (file, position, first) in zip(pairwise(edges), references, strict=True):
            used += -(-(stop - start) // segment_multiple) * segment_multiple
            if stop <= start or used > capacity:
                return row, 1
            if not 0 <= file < len(directories) or not 0 <= position < directories[file][1]:
                return row, 3
            document = directories[file][0] + position
            if first < 0 or first + stop - start > lengths[document]:
                return row, 4
            pieces.append((document, first, stop - start))
        found.append(pieces)
    return found


def mark_trained(texts, kinds, spaces, spacing, spans):
    """For each text, of each of its tokens: (1 if it holds a byte of a span, 2 if it begins before
    that span, else 0; which span that is); or None where that is not certain.

    texts: (the text's bytes, its tokens' (id, bytes)); kinds: id -> 0, 1 or 2.
    """
    marked = []
    for (text, tokens), wanted in zip(texts, spans, strict=True):
        places = _places(text, tokens, kinds, spaces, spacing)
        bytes_of_spans = {at for begin, end in wanted for at in range(begin, end)}
        held = [sorted(bytes_of_spans & set(range(a, max(a + 1, b)))) for a, b in places or []]
        marked.append(
            places
            and [
                (
                    bool(own) + bool(own and own[0] > a),
                    next((i for i, (b, e) in enumerate(wanted) if own and b <= own[0] < e), None),
                )
                for own, (a, _) in zip(held, places, strict=True)
            ]
        )
    return marked


def find_in_texts(texts, code_points):
    """Which texts hold a character of a set of code points."""
    return [any(ord(character) in code_points for character in text) for text in texts]


def _places(text, tokens, kinds, spaces, spacing):
    """The bytes (first, end) of every token; None where they are not the text."""
    mark, found, at, fresh = "▁".encode(), [], 0, spacing > 0
    for token, whole in tokens:
        piece = whole
        if kinds.get(token, 0) == 0:
            return None
        if kinds[token] == 2:
            fresh = spacing in (1, 2)
        elif fresh:
            fresh = False
            if spacing == 1 or not text[at:].startswith((b" ", mark)):
                if not piece.startswith(mark):
                    return None
                piece = piece[len(mark) :]
        pattern = re.escape(piece)
        if spaces:
            pattern = pattern.replace(mark, b"(?:" + mark + b"| )")
        match = re.compile(pattern, re.DOTALL).match(text, at)
        if match is None:
            return None
        found.append(match.span())
        at = match.end()
    return found if at == len(text) else None


def balance_rows(  # noqa: PLR0912 one loop in the other, as the rule is
    lengths, row_offsets, capacity, multiple, most_segments
):
    """(order, row_offsets, exchanges) by the same rule, costs summed anew whenever asked for."""
    paired, passes, exchanges = 16, 16, 0
    lengths = [int(length) for length in lengths]
    rows = [list(range(a, b)) for a, b in pairwise(row_offsets)]
    if not rows:
        return [], [0], 0

    def cost(row):
        return sum(lengths[i] ** 2 for i in rows[row])

    def row_of(segment):
        return next(row for row, segments in enumerate(rows) if segment in segments)

    def taken(length):
        return -(-length // multiple)

    mean = sum(map(cost, range(len(rows)))) // len(rows)
    for number in range(passes):
        cheapest_first, before = sorted(range(len(rows)), key=cost), exchanges
        listed = {}
        for row in reversed(cheapest_first):
            for segment in rows[row]:
                listed.setdefault(lengths[segment], []).append(segment)
        for y in cheapest_first:
            apart = -(-len(rows[y]) // paired)
            own = rows[y][-number % apart :: apart]
            while cost(y) < mean:
                best = (0, None)
                for i, b in enumerate(own):
                    for c in own[:i]:
                        together = listed.get(lengths[b] + lengths[c], [])
                        while together and cost(row_of(together[0])) <= mean:
                            together.pop(0)
                        if not together:
                            continue
                        x, moved = row_of(together[0]), 2 * lengths[b] * lengths[c]
                        gain = moved * (cost(x) - cost(y) - moved)
                        full = len(rows[x]) == most_segments
                        same = taken(lengths[b]) + taken(lengths[c]) == taken(lengths[together[0]])
                        if gain > best[0] and same and not full:
                            best = (gain, (b, c, x, together))
                if best[1] is None:
                    break
                b, c, x, together = best[1]
                longer = together.pop(0)
                rows[x] = [c, b, *(i for i in rows[x] if i != longer)]
                rows[y] = [longer, *(i for i in rows[y] if i not in (b, c))]
                own[own.index(b)] = longer
                own[own.index(c)] = own[-1]
                own.pop()
                exchanges += 1
        if exchanges == before:
            break
    return [i for row in rows for i in row], np.cumsum([0, *map(len, rows)]).tolist(), exchanges


def read_lists(texts):
    """The lists of ids, or of true and false, in JSON; None where anything else is there."""
    lists = [json.loads(text) for text in texts]
    if not all(isinstance(one, list) for one in lists):
        return None
    values = [value for one in lists for value in one]
    are_ids = all(isinstance(value, int) and 0 <= value < 1 << 31 for value in values)
    return [[int(value) for value in one] for one in lists] if are_ids else None


def copy_ids(values):
    """(ids, whether they all are ids)"""
    return values, all(0 <= value < 1 << 31 for value in values)


def copy_trained(labels, ids):
    """(trained, whether labels are ids or -100)"""
    trained = [int(label != IGNORED) for label in labels]
    return trained, all(label in (IGNORED, own) for label, own in zip(labels, ids, strict=True))


def count_real(mask):
    return sum(mask) if set(mask) <= {0, 1} else -1


def keep_real(mask, offsets, ids, trained):
    """(ids, trained, offsets) without the tokens whose mask is 0"""
    kept = [i for i in range(len(ids)) if mask[i]]
    kept_offsets = [sum(i < offset for i in kept) for offset in offsets]
    return [ids[i] for i in kept], [trained[i] for i in kept], kept_offsets


def count_trained(trained, begin, end):
    return [sum(trained[first:last]) for first, last in zip(begin, end, strict=True)]


def _murmur3_x64_128(data):
    """MurmurHash3_x64_128 of bytes, seed 0, as two 64-bit numbers."""
    c1, c2, h1, h2 = 0x87C37B91114253D5, 0x4CF5AD432745937F, 0, 0

    def rotated(x, by):
        return (x << by | x >> 64 - by) & _MASK

    def first(k):
        return rotated(k * c1 & _MASK, 31) * c2 & _MASK

    def second(k):
        return rotated(k * c2 & _MASK, 33) * c1 & _MASK

    def mixed(k):
        k = (k ^ k >> 33) * 0xFF51AFD7ED558CCD & _MASK
        k = (k ^ k >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
        return k ^ k >> 33

    whole = len(data) // 16 * 16
    for at in range(0, whole, 16):
        k1, k2 = (int.from_bytes(data[at + i : at + i + 8], "little") for i in (0, 8))
        h1 = (rotated(h1 ^ first(k1), 27) + h2) * 5 + 0x52DCE729 & _MASK
        h2 = (rotated(h2 ^ second(k2), 31) + h1) * 5 + 0x38495AB5 & _MASK
    h2 ^= second(int.from_bytes(data[whole + 8 :], "little"))
    h1 ^= first(int.from_bytes(data[whole : whole + 8], "little"))
    h1, h2 = h1 ^ len(data), h2 ^ len(data)
    h1 = h1 + h2 & _MASK
    h2 = h2 + h1 & _MASK
    h1, h2 = mixed(h1), mixed(h2)
    h1 = h1 + h2 & _MASK
    return h1, h2 + h1 & _MASK


def hash_documents(ids, offsets):
    data = b"".join(int(token).to_bytes(4, "little") for token in ids)
    return [_murmur3_x64_128(data[4 * begin : 4 * end]) for begin, end in pairwise(offsets)]


def count_stretches(trained, offsets):
    """Where each document's stretches begin among the edges of all."""
    edges = [0]
    for begin, end in pairwise(offsets):
        flags = [False, *map(bool, trained[begin:end])]
        begun = sum(now and not before for before, now in pairwise(flags))
        edges.append(edges[-1] + 2 * begun)
    return edges


def stretches(trained, offsets):
    """[start, stop, ...] of what is trained on, document after document."""
    found = []
    for begin, end in pairwise(offsets):
        flags = [False, *map(bool, trained[begin:end]), False]
        found += [place for place, (a, b) in enumerate(pairwise(flags)) if a != b]
    return found


def gather_documents(documents, document, start, length):
    """The pieces of lists of tokens, end to end, and the first that is in none, or -1."""
    out = []
    for i, piece in enumerate(zip(document, start, length, strict=True)):
        number, first, count = map(int, piece)
        inside = 0 <= number < len(documents) and first >= 0 and count >= 0
        if not inside or first + count > len(documents[number]):
            return out, i
        out += list(documents[number][first : first + count])
    return out, -1


def gather_trained(stretches_of, document, start, length):
    """1 where the tokens of pieces are trained on. `stretches_of`: None for everything."""
    out = []
    for piece in zip(document, start, length, strict=True):
        number, first, count = map(int, piece)
        edges = stretches_of[number]
        pairs = [(0, 1 << 31)] if edges is None else zip(edges[::2], edges[1::2], strict=True)
        inside = {at for a, b in pairs for at in range(max(a, first), min(b, first + count))}
        out += [int(at in inside) for at in range(first, first + count)]
    return out


def find_elements(data, first):
    """[begin, end] of each element of the array that ends in `data`, from byte `first` on."""
    strings = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.DOTALL)
    plain = data[:first] + strings.sub(lambda string: b"x" * len(string[0]), data[first:])
    depth, begin, found = 0, -1, []
    for at in range(first, len(data)):
        byte = plain[at : at + 1]
        if begin < 0 and byte not in b" \t\r\n,]}":
            begin = at
        depth += (byte in b"[{") - (byte in b"]}")
        if depth < 0 or (byte == b"," and depth == 0):
            found.append([begin, at])
            begin = -1
        if depth < 0:
            break
    return found


def find_texts(records, name, others):
    """The texts of the records before the first that is odd, and their values of other names."""
    texts, values = [], [[] for _ in others]
    for record in records:
        fields = _fields_of(record, [name, *others])
        if fields is None or not isinstance(fields.get(name), str):
            break
        texts.append(fields[name].encode())
        for other, found in zip(others, values, strict=True):
            found.append(fields.get(other))
    return texts, values


def _fields_of(record, names):
    """The values of names in a JSON object; None where they are not certain."""
    try:
        source = record.decode().strip(" \t\r\n")
        record = json.loads(source, object_pairs_hook=_Pairs, parse_constant=int)
        json.dumps(record, ensure_ascii=False).encode()  # raises for lone surrogates
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, _Pairs) or _depth(record) > 64:
        return None
    decoder, at, fields = json.JSONDecoder(), 1, {}
    for _ in record:
        at = source.index('"', at)
        own, end = decoder.raw_decode(source, at)
        if "\\" in source[at:end]:
            return None
        at = re.compile(r"\s*:\s*").match(source, end).end()
        value, at = decoder.raw_decode(source, at)
        if own in names and own in fields:
            return None
        fields[own] = value
    return fields


class _Pairs(list):
    """An object's names and values."""


def _depth(value):
    inner = [one for _, one in value] if isinstance(value, _Pairs) else value
    return 1 + max(map(_depth, inner), default=0) if isinstance(value, list) else 0


def costliest_first(costs, size):
    """Row numbers, those of each `size` rows sorted."""
    blocks = [range(begin, min(begin + size, len(costs))) for begin in range(0, len(costs), size)]
    return [row for block in blocks for row in sorted(block, key=lambda row: -costs[row])]


def deal(costs, world_size, batch_size, micro_batches, exchange):
    """Row numbers by places: each step's rows i of all ranks, one i after another."""
    size, places = world_size * batch_size * micro_batches, []
    for begin in range(0, len(costs), size):
        step = range(begin, min(begin + size, len(costs)))
        groups = [step[i : i + world_size] for i in range(0, len(step), world_size)]
        tuples = [_largest_first([(costs[row], [row]) for row in group]) for group in groups]
        micro_steps = [
            _differenced(tuples[i : i + batch_size]) for i in range(0, len(tuples), batch_size)
        ]
        ranks = [sorted(rows) for _, rows in _differenced(micro_steps)]
        if exchange:
            _even_out(ranks, costs)
        places += [row for rows in zip(*ranks, strict=True) for row in rows]
    return places


def _even_out(ranks, costs):
    """Exchanges between the costliest rank and the cheapest, the best one each time."""
    sums = [sum(costs[row] for row in rank) for rank in ranks]
    total = sum(sums)
    for _ in ranks:
        most, least = sums.index(max(sums)), sums.index(min(sums))
        gap = sums[most] - sums[least]
        if sums[most] * len(ranks) <= total + total / 1024:
            return
        pairs = [(a, b) for a in ranks[most] for b in ranks[least]]
        a, b = max(pairs, key=lambda pair: _moved(costs, gap, *pair))  # of equal ones, the first
        if _moved(costs, gap, a, b) <= gap / 1024:
            return
        d = costs[a] - costs[b]
        sums[most], sums[least] = sums[most] - d, sums[least] + d
        ranks[most] = sorted({*ranks[most], b} - {a})
        ranks[least] = sorted({*ranks[least], a} - {b})


def _moved(costs, gap, a, b):
    """By how much the lesser of both sums comes nearer to the other's."""
    d = costs[a] - costs[b]
    return min(d, gap - d)


def _differenced(tuples):
    """Of tuples of (sum, rows) the two whose sums differ most are added, until one is left."""
    tuples = list(tuples)
    while len(tuples) > 1:
        a, b = sorted(range(len(tuples)), key=lambda i: tuples[i][-1][0] - tuples[i][0][0])[:2]
        both = zip(tuples[a], reversed(tuples[b]), strict=True)
        tuples[a] = _largest_first([(x + y, rows + more) for (x, rows), (y, more) in both])
        del tuples[b]
    return tuples[0]


def _largest_first(sums):
    return sorted(sums, key=lambda one: -one[0])


_REASONING = ("reasoning_content", "thinking", "reasoning")


def is_plain(message, parsed):
    """Whether templates know the message as it is."""
    if type(message) is not dict or None in message.values():
        return False
    calls = message.get("tool_calls", [])
    return (
        (type(message.get("role")), type(message.get("content"))) == (str, str)
        and parsed.isdisjoint(message.keys() - {"tool_calls"})
        and (type(calls) is list and all(type(call) is dict for call in calls))
    )


def key_of(message):
    """What tells a message of a usual kind from others; None for unusual ones."""
    if type(message) is not dict or type(message.get("role")) is not str:
        return None
    role, has_content = message["role"], "content" in message
    calls = message.get("tool_calls")
    text = message.get("content", "")
    if type(text) is not str:
        return None
    if text[:1] == "<" or text[:1].isspace() or (role == "assistant" and "</think>" in text):
        return None
    if list(message) == ["role", "content"] and text:
        return role
    if any(name in message for name in _REASONING):
        return None
    if type(calls) not in (list, type(None)) or any(type(call) is not dict for call in calls or ()):
        return None
    key = role, bool(text) if has_content else None, tuple(message)
    return key if calls is None else (*key, tuple(map(_call, calls)))


def _call(call):
    inside = type(call.get("function")) is dict
    inner = call["function"] if inside else call
    arguments = inner.get("arguments")
    return inside, "name" in inner, type(arguments), not arguments


def kinds_of(messages, known, make):
    keys = map(key_of, messages)
    return tuple(
        known[key] if key in known and key is not None else make(message, key)
        for message, key in zip(messages, keys, strict=True)
    )


def may_hold(value, part):
    """Whether a string of the value, no field's name, has the part; true of what JSON has not."""
    if type(value) is str:
        return part in value
    if type(value) in (dict, list, tuple):
        items = value.values() if type(value) is dict else value
        return any(may_hold(item, part) for item in items)
    return type(value) not in (int, float, bool, type(None))


def ends_at(pieces, counts):
    """The lengths of the first so many pieces."""
    return [len("".join(pieces[:count])) for count in counts]
