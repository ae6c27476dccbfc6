"""Looks at the messages of conversations: at many small dicts, with few words for each."""

from cpython.dict cimport PyDict_Next
from cpython.object cimport PyObject
from cpython.unicode cimport PyUnicode_Contains

cdef extern from "Python.h":
    Py_UCS4 PyUnicode_READ_CHAR(object text, Py_ssize_t index)
    Py_ssize_t PyUnicode_GET_LENGTH(object text)
    bint Py_UNICODE_ISSPACE(Py_UCS4 character)

cdef str THOUGHT = "</think>"
cdef tuple REASONING = ("reasoning_content", "thinking", "reasoning")


def is_plain(message, frozenset parsed):
    """Whether a message is what templates know as it is: a dict without None, whose role and
    content are strings, and without any of the keys `parsed` but a list of dicts as tool_calls.
    """
    cdef Py_ssize_t at = 0
    cdef PyObject* key
    cdef PyObject* value
    if type(message) is not dict:
        return False
    if type((<dict>message).get("role")) is not str:
        return False
    if type((<dict>message).get("content")) is not str:
        return False
    while PyDict_Next(message, &at, &key, &value):
        if <object>value is None:
            return False
        if <object>key in parsed:
            if <object>key != "tool_calls" or type(<object>value) is not list:
                return False
            for call in <list><object>value:
                if type(call) is not dict:
                    return False
    return True


def kinds_of(list messages, dict known, make):
    """A tuple of the kinds of messages: `known[key_of(message)]`, else `make(message, key)`."""
    cdef list kinds = []
    for message in messages:
        key = key_of(message)
        kind = None if key is None else known.get(key)
        kinds.append(make(message, key) if kind is None else kind)
    return tuple(kinds)


cpdef key_of(message):
    """What tells a message of a usual kind from those of other kinds; None for unusual ones.

    Usual are messages with a role and without reasoning, whose content is nothing or begins with a
    word (and has no `</think>`, if it is the assistant's), and whose tool calls are dicts. The key
    is the role of messages that have nothing but that and content, in this order; else (role,
    whether there is content, or None without the field, the names of the fields, and for each call:
    whether it has a function, whether that has a name, the type of its arguments, whether they are
    empty).
    """
    cdef dict fields
    cdef Py_UCS4 first
    if type(message) is not dict:
        return None
    fields = <dict>message
    role, content = fields.get("role"), fields.get("content")
    if type(role) is not str:
        return None
    has_words = None
    if type(content) is str:
        has_words = PyUnicode_GET_LENGTH(content) > 0
        if has_words:
            first = PyUnicode_READ_CHAR(content, 0)
            if first == c"<" or Py_UNICODE_ISSPACE(first):
                return None
            if role == "assistant" and PyUnicode_Contains(content, THOUGHT):
                return None
            if len(fields) == 2 and _begins_with_role(fields):
                return role
    elif content is not None or "content" in fields:
        return None
    for name in REASONING:
        if name in fields:
            return None
    calls = fields.get("tool_calls")
    if calls is None:
        return role, has_words, tuple(fields)
    if type(calls) is not list:
        return None
    cdef list looks = []
    for call in <list>calls:
        if type(call) is not dict:
            return None
        function = (<dict>call).get("function")
        inner = function if type(function) is dict else call
        arguments = (<dict>inner).get("arguments")
        looks.append((function is inner, "name" in <dict>inner, type(arguments), not arguments))
    return role, has_words, tuple(fields), tuple(looks)


cdef bint _begins_with_role(dict fields):
    cdef Py_ssize_t at = 0
    cdef PyObject* key
    cdef PyObject* value
    PyDict_Next(fields, &at, &key, &value)
    return <object>key == "role"


cpdef bint may_hold(value, str part):
    """Whether any string in a value of JSON may hold a part, but for the names of fields; true
    also of values that JSON has not.
    """
    cdef Py_ssize_t at = 0
    cdef PyObject* key
    cdef PyObject* item
    kind = type(value)
    if kind is str:
        return PyUnicode_Contains(value, part)
    if kind is dict:
        while PyDict_Next(value, &at, &key, &item):
            if may_hold(<object>item, part):
                return True
        return False
    if kind is list:
        for one in <list>value:
            if may_hold(one, part):
                return True
        return False
    if kind is tuple:
        for one in <tuple>value:
            if may_hold(one, part):
                return True
        return False
    return not (value is None or kind is int or kind is float or kind is bool)


def ends_at(list pieces, list counts):
    """For each of `counts`, ascending, the length of so many of the pieces (strings) together."""
    cdef list ends = []
    cdef Py_ssize_t end = 0, at = 0, count
    for count in counts:
        while at < count:
            end += len(pieces[at])
            at += 1
        ends.append(end)
    return ends
