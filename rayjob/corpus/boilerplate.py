"""Which rows are boilerplate: what a shop or a publisher put around a book, thousands of times the same.

A row goes when it holds, in any case and with any spacing of its punctuation, one of

- the name of the shop, "smashwords";
- "isbn";
- "all rights reserved", or "copyright" followed by a year or a sign;
- a re-sale notice: "this ebook is licensed for your personal …", "… may not be re-sold …", "purchase an additional
  copy", "purchase your own copy", "thank you for respecting the hard work of this author";
- a reproduction notice: "no part of this book may be reproduced", "without the (prior) written permission of";
- the disclaimer of fiction: "resemblance to actual persons", "this is a work of fiction".

The rule reads the row as it stands in the source. It is a rule about phrases that no story uses, so it leaves a
licence line that says it otherwise; the corpus card lists the most frequent lines that went.
"""

import pyarrow as pa
import pyarrow.compute as pc

_BOOK = r"(?:e ?-? ?book|book|publication|story)"
PATTERN = "|".join(
    (
        r"smashwords",
        r"\bisbn\b",
        r"all rights reserved",
        r"copyright(?:ed)? ?(?:©|\( ?c ?\)|-lrb- ?c ?-rrb-|[:,]? ?(?:by |19|20)\d*)",
        rf"this {_BOOK} is licen[sc]ed for your personal",
        rf"{_BOOK} may not be (?:re ?-? ?sold|given away|reproduced)",
        r"purchase (?:an additional|your own) copy",
        r"thank you for respecting the (?:hard )?work of",
        rf"no part of this {_BOOK} may be",
        r"without the (?:prior |express )?written (?:permission|consent) of the (?:author|publisher)",
        r"resemblance to (?:actual|real|any) (?:persons?|people|events)",
        r"this (?:book |story |novel )?is a work of fiction",
    )
)


def find_boilerplate(rows: pa.Array) -> pa.Array:
    """Whether each row (bytes) is boilerplate, by the rule above; null for null."""
    return pc.match_substring_regex(rows, PATTERN, ignore_case=True)
