"""Common column names of click logs, by the role or the kind that they suggest.

Case and separators do not matter.
"""

import re

LABELS = (
    "click",
    "clicked",
    "clk",
    "isclick",
    "isclicked",
    "isclk",
    "hasclick",
    "hasclicked",
    "didclick",
    "wasclicked",
    "clickflag",
    "clicklabel",
    "adclick",
    "clickyn",
    "iclick",
    "ctrlabel",
)
"""Names of click columns, reduced to letters and digits, with the most likely names first."""
TARGETS = (
    "label",
    "target",
    "y",
    "labels",
    "ylabel",
    "outcome",
    "response",
    "islabel",
    "isclickedlabel",
)
"""General names of label columns, which do not tell the event that is predicted."""
CONVERSIONS = (
    "converted",
    "conversion",
    "isconversion",
    "isconverted",
    "convert",
    "cvr",
    "purchased",
    "purchase",
    "ispurchase",
    "ispurchased",
    "bought",
    "buy",
    "isbuy",
    "isbought",
    "sale",
    "sold",
    "order",
    "ordered",
    "isorder",
    "installed",
    "install",
    "isinstall",
    "isinstalled",
    "booked",
    "booking",
    "isbooking",
    "bookingbool",
    "subscribed",
    "signup",
    "isattributed",
    "attribution",
)
"""Column names of events that follow a click, such as a purchase."""
REACTIONS = (
    "like",
    "liked",
    "islike",
    "isliked",
    "follow",
    "followed",
    "isfollow",
    "share",
    "shared",
    "isshare",
    "comment",
    "commented",
    "iscomment",
    "forward",
    "isforward",
    "favorite",
    "favourite",
    "isfavorite",
    "fav",
    "isfav",
    "cart",
    "addtocart",
    "iscart",
    "addcart",
    "hate",
    "ishate",
    "dislike",
    "isdislike",
    "thumbsup",
    "longview",
    "islongview",
    "profileenter",
    "isprofileenter",
    "finish",
    "isfinish",
    "saved",
    "bookmarked",
    "readcomment",
    "clickavatar",
)
"""Names of user reactions to a shown item, other than clicks."""
_OUTCOMES = re.compile(
    r"(^|_)dwell(_|$)|(^|_)time_spent(_|$)"
    r"|(^|_)(watch|watched|play|played|view|viewing|read|reading|stay|listen|browse)_"
    r"(time|duration|seconds|secs|sec|s|ms|minutes|ratio)(_|$)"
    r"|(^|_)(watchtime|playtime|viewtime|staytime|dwelltime|readtime)(_|$)"
    r"|^(conversion|purchase|order|booking)_(id|value|time|timestamp|delay|amount)$|(^|_)time_delay_for_conversion$"
    r"|(^|_)(revenue|payout|gmv|gross_bookings?|sales_amount|click_time|click_timestamp|click_ts|clicked_at"
    r"|converted_at|purchased_at)(_|$)"
)
"""Names of columns with numbers and times that become known only after the row was shown. The words
of a name are separated by underscores."""
TIMES = (
    "eventtime",
    "timestamp",
    "ts",
    "time",
    "datetime",
    "eventtimestamp",
    "eventts",
    "timestampms",
    "timems",
    "unixtime",
    "unixtimestamp",
    "epoch",
    "epochms",
    "impressiontime",
    "impressiontimestamp",
    "exposuretime",
    "exposetime",
    "showtime",
    "shownat",
    "showntime",
    "requesttime",
    "servedat",
    "servetime",
    "logtime",
    "actiontime",
    "sessiontime",
    "createdat",
    "createdtime",
    "createtime",
    "occurredat",
    "loggedat",
    "clicktime",
    "localtime",
    "utctime",
    "date",
    "eventdate",
    "dt",
    "hour",
    "day",
    "datehour",
    "yyyymmdd",
    "thedate",
)
"""Column names for the time when a row was shown, with the most likely names first."""
CERTAIN_TIMES = frozenset(TIMES[: TIMES.index("sessiontime")]) - {"time", "showtime"}
"""Column names that are used only for times. If a column with one of these names has no valid
times, the drafted file asks the user."""
REQUESTS = (
    "requestid",
    "request",
    "reqid",
    "req",
    "impressionid",
    "impression",
    "impid",
    "impressionsid",
    "searchid",
    "queryid",
    "listid",
    "auctionid",
    "bidid",
    "logid",
    "traceid",
    "slateid",
    "pageviewid",
    "displayid",
    "srchid",
    "rankingid",
    "recommendationid",
    "recoid",
)
SESSIONS = ("sessionid", "session", "sess", "sessid", "sid", "visitid", "visit")
ROWS = (
    "row",
    "slot",
    "rowid",
    "rownumber",
    "rownum",
    "rowno",
    "itemindex",
    "listposition",
    "index",
    "idx",
    "position",
)
WEIGHTS = ("sampleweight", "exampleweight", "instanceweight", "importanceweight", "rowweight")
USERS = (
    "user",
    "uid",
    "usr",
    "customer",
    "cust",
    "visitor",
    "member",
    "subscriber",
    "buyer",
    "shopper",
    "viewer",
    "reader",
    "listener",
    "player",
    "person",
    "account",
    "profile",
    "client",
    "cookie",
    "msno",
    "anonymous",
    "device",
)
"""Words in column names that refer to the person who sees a row. The most likely words come first.
A word counts if it is the complete column name, or if one of `_ID_ENDS` follows it."""
ITEMS = (
    "item",
    "product",
    "sku",
    "article",
    "movie",
    "video",
    "song",
    "track",
    "photo",
    "news",
    "goods",
    "ad",
    "advert",
    "adgroup",
    "creative",
    "banner",
    "doc",
    "document",
    "content",
    "post",
    "listing",
    "offer",
    "book",
    "game",
    "recipe",
    "hotel",
    "prop",
    "asin",
    "iid",
)
"""Words in column names that refer to the shown item."""
INDEXES = (
    "id",
    "index",
    "idx",
    "rowid",
    "rownumber",
    "rownum",
    "rowno",
    "row",
    "no",
    "nr",
    "recordid",
    "unnamed0",
    "level0",
    "eventid",
    "uuid",
    "guid",
    "key",
    "rn",
    "pk",
    "seq",
)
"""Names of columns with row numbers or row ids."""
_ID_ENDS = frozenset(
    {"id", "idx", "no", "nr", "num", "key", "code", "hash", "uuid", "guid", "token"}
)
_ONLY_WITH_ID = frozenset(
    {"device", "client", "account", "profile", "player", "person", "anonymous"}
)
"""Words that refer to a user only if an ending such as `id` follows. For example, `device_id`
refers to a user, but `device` refers to a type of device."""
_ENTITY_WORDS = frozenset(
    {
        "pseudo",
        "anonymous",
        "anon",
        "hashed",
        "encrypted",
        "global",
        "internal",
        "external",
        "unique",
        "full",
        "target",
        "candidate",
        "shown",
        "raw",
        "the",
    }
)
_NO_IDS = re.compile(
    r"(paid|prepaid|bid|valid|grid|void|avoid|solid|rapid|covid|acid|hybrid|liquid|raid|kid|humid|android|fluid|rigid)$"
)
_OF_CATEGORIES = frozenset(
    {
        "id",
        "ids",
        "idx",
        "uid",
        "code",
        "type",
        "kind",
        "category",
        "cat",
        "class",
        "zip",
        "zipcode",
        "postcode",
        "brand",
        "shop",
        "item",
        "user",
        "device",
        "customer",
        "sku",
        "store",
        "seller",
        "vendor",
        "merchant",
        "author",
        "channel",
        "segment",
        "cluster",
        "hash",
        "campaign",
        "publisher",
        "advertiser",
        "site",
        "app",
        "page",
        "region",
    }
)
_OF_NUMBERS = frozenset(
    {
        "num",
        "count",
        "counts",
        "cnt",
        "n",
        "age",
        "price",
        "prices",
        "amount",
        "qty",
        "quantity",
        "days",
        "hours",
        "minutes",
        "seconds",
        "secs",
        "ms",
        "rate",
        "ctr",
        "score",
        "rank",
        "total",
        "sum",
        "avg",
        "mean",
        "max",
        "min",
        "std",
        "ratio",
        "pct",
        "percent",
        "length",
        "len",
        "size",
        "width",
        "height",
        "distance",
        "duration",
        "cost",
        "bid",
        "budget",
        "views",
        "clicks",
        "likes",
        "visits",
        "impressions",
        "stock",
        "income",
        "salary",
        "salesrank",
        "discount",
        "revenue",
        "balance",
        "lat",
        "lon",
        "lng",
        "temperature",
        "rating",
        "stars",
        "frequency",
        "recency",
    }
)
_LISTS = frozenset(
    {
        "list",
        "seq",
        "sequence",
        "history",
        "hist",
        "tags",
        "genres",
        "ids",
        "recent",
        "last",
        "keywords",
        "viewed",
        "categories",
        "items",
        "topics",
        "labels",
        "interests",
        "actors",
        "ingredients",
        "brands",
        "colors",
        "skus",
        "products",
        "articles",
        "videos",
        "entities",
        "tokens",
        "array",
        "set",
        "multi",
        "languages",
        "skills",
    }
)
_NO_PLURALS = re.compile(
    r"(ss|us|is|news|series|species|days|hours|views|clicks|times|status|os|gps|sms|class)$"
)
_PROSE = frozenset(
    {
        "title",
        "name",
        "text",
        "description",
        "desc",
        "query",
        "headline",
        "url",
        "uri",
        "link",
        "address",
        "city",
        "comment",
        "review",
        "summary",
        "abstract",
        "body",
        "message",
        "agent",
        "referrer",
        "country",
        "search",
    }
)
_SUFFIX = re.compile(r":(token|float|token_seq|float_seq)$")


def suffix_of(name: str) -> str | None:
    """Return the type suffix after the colon in a column name of RecBole, or None.

    >>> suffix_of("user_id:token"), suffix_of("user_id")
    ('token', None)
    """
    found = _SUFFIX.search(name)
    return found[1] if found else None


def letters(name: str) -> str:
    """Return a name's letters and digits in lower case, without a type after a colon.

    >>> letters("Event-Time"), letters("item_id:token")
    ('eventtime', 'itemid')
    """
    return re.sub(r"[^a-z0-9]", "", _SUFFIX.sub("", name).lower())


def words(name: str) -> list[str]:
    """Return the words of a name in lower case.

    >>> words("userID"), words("last_itemIds"), words("C14")
    (['user', 'id'], ['last', 'item', 'ids'], ['c', '14'])
    """
    parts = re.findall(
        r"[A-Z]+(?=s\b|s_)s|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", _SUFFIX.sub("", name)
    )
    return [part.lower() for part in parts]


def is_negated_label(name: str) -> bool:
    """Return whether a column's name means that a row was not clicked.

    >>> is_negated_label("nonclk"), is_negated_label("not_clicked"), is_negated_label("click")
    (True, True, False)
    """
    whole = letters(name)
    return any(
        whole.startswith(no) and whole[len(no) :] in LABELS
        for no in ("no", "non", "not", "un", "isno", "isnot")
    )


def is_named_as(name: str, entities: tuple[str, ...]) -> str | None:
    """Return the entity that a column's name denotes, or None if it denotes no entity.

    The column's name may also have an ending such as `id`.

    >>> is_named_as("userid", USERS), is_named_as("customer_no", USERS)
    ('user', 'customer')
    >>> is_named_as("item_category_id", ITEMS) is None
    True
    """
    whole, parts = letters(name), words(name)
    for entity in entities:
        if (whole == entity and entity not in _ONLY_WITH_ID) or (
            whole.startswith(entity) and whole[len(entity) :] in _ID_ENDS
        ):
            return entity
        if entity in parts and parts[-1] in _ID_ENDS:
            others = [
                part for part in parts if part != entity and part not in _ID_ENDS | _ENTITY_WORDS
            ]
            if not others:
                return entity
    return None


def is_id(name: str) -> bool:
    """Return whether a column's name is typical of ids or other categories.

    >>> is_id("itemID"), is_id("adgroupid"), is_id("paid"), is_id("shop_code")
    (True, True, False, True)
    """
    parts = words(name)
    if any(part in _OF_CATEGORIES for part in parts[-1:]):
        return True
    if is_named_as(name, USERS) or is_named_as(name, ITEMS):
        return True
    last = parts[-1] if parts else ""
    return len(last) > 2 and last.endswith(("id", "ids")) and not _NO_IDS.search(last)


def is_number(name: str) -> bool:
    """Return whether a column's name is typical of a quantity."""
    return any(part in _OF_NUMBERS for part in words(name))


def is_list(name: str) -> bool:
    """Return whether a column's name is typical of a list: a plural, or a word for a list.

    >>> is_list("genres"), is_list("last_items"), is_list("status"), is_list("title")
    (True, True, False, False)
    """
    parts = words(name)
    if not parts or is_prose(name):
        return False
    if any(part in _LISTS for part in parts):
        return True
    last = parts[-1]
    return len(last) > 3 and last.endswith("s") and not _NO_PLURALS.search(last)


def is_prose(name: str) -> bool:
    """Return whether a column's name is typical of a text of several words."""
    return any(part in _PROSE for part in words(name))


def is_outcome(name: str) -> bool:
    """Return whether a column with this name usually gets its value after the row was shown."""
    return _OUTCOMES.search("_".join(words(name))) is not None
