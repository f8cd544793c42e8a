"""Messages of records with the default recommender's columns.

Classes are also generated from a published schema by Protobuf itself.
"""

import re

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from evergreen.contracts.record_format import RecordFormat
from testing.recommenders import SHOP

FORM = RecordFormat(SHOP.features)
encode, decode = FORM.encode, FORM.decode


def fields_of(proto: str) -> dict[str, list[tuple[bool, str, str, int]]]:
    """Return each message's fields: whether the field is repeated, its type, name and number."""
    messages: dict[str, list[tuple[bool, str, str, int]]] = {"LogRecord": []}
    inner = None
    for line in proto.splitlines()[3:]:
        if begin := re.fullmatch(r"  message (\w+) \{", line):
            inner = begin[1]
            messages[inner] = []
        elif line.strip() == "}":
            inner = None
        else:
            repeated, kind, name, number = re.match(
                r" *(repeated )?(\w+) (\w+) = (\d+);", line
            ).groups()
            messages[inner or "LogRecord"].append((bool(repeated), kind, name, int(number)))
    return messages


def reader_of(proto: str):
    """Return a Protobuf class of log records, generated from the published schema."""
    file = descriptor_pb2.FileDescriptorProto(name="other.proto", syntax="proto3")
    messages = fields_of(proto)
    for message, fields in messages.items():
        described = file.message_type.add(name=message)
        for repeated, kind, name, number in fields:
            field = described.field.add(name=name, number=number, label=3 if repeated else 1)
            if kind in messages:
                field.type, field.type_name = 11, f".{kind}"
            else:
                field.type = getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("LogRecord"))
