"""The fixed vocabularies of the Fast Ask world, and the sizes of its tables.

Every value is one capitalised word: short for any tokenizer, and never a prefix of another
value in its list.  80 customers keep the best constant guess of a name below 2 %.
"""

from __future__ import annotations

from dataclasses import dataclass

CUSTOMERS = (
    "Acorn Alder Amber Anvil Apex Arbor Argo Aspen Atlas Aurora Badger Basalt Beacon Birch Bison "
    "Bolt Boreal Bramble Bronze Brook Cactus Canyon Cedar Chalk Cinder Citrus Clover Cobalt Comet "
    "Copper Coral Cosmos Crane Crater Cypress Dahlia Delta Dove Dune Eagle Ebony Echo Elm Ember "
    "Falcon Fern Fjord Flint Fossil Garnet Geyser Ginkgo Glacier Granite Grove Harbor Hawk Hazel "
    "Heron Holly Indigo Iris Ivory Jade Juniper Kelp Kestrel Lagoon Larch Laurel Lichen Lotus "
    "Lynx Maple Marble Meadow Merlin Mesa Nebula Nimbus"
).split()
VENDORS = (
    "Oakline Onyx Opal Orbit Orchid Osprey Otter Oxbow Palm Pebble Pelican Pine Pixel Plover "
    "Poplar Prairie Prism Puffin Pulsar Quarry Quartz Quill Radar Raven Reef Ridge River Robin "
    "Rowan Ruby Rustic Saffron Sage Salmon Sapphire Sequoia Shale Sienna Silver Slate Sparrow "
    "Spruce Stork Summit Sumac Swift Talon Teak Tempo Thistle Thyme Tidal Timber Topaz Tulip "
    "Tundra Umber Unity Valley Vega Velvet Verdant Violet Vista Walnut Willow Wren Yarrow Yucca "
    "Zenith Zephyr Zinc Zircon Tern Sorrel Quince Pumice Plum Pyrite Sable"
).split()
REGIONS = ("North", "South", "East", "West", "Central")
TIERS = ("Basic", "Plus", "Gold", "Elite")
CURRENCIES = ("USD", "EUR", "GBP", "CAD")
METHODS = ("Wire", "Ach", "Card", "Check")
SOURCES = ("Bank", "Portal", "Lockbox", "Manual")
REASONS = ("Credit", "Discount", "Dispute", "Rounding")
SPEND_REASONS = ("Credit", "Correction", "Rebate")
ENTRY_SOURCES = ("Import", "Upload", "Journal", "Feed")
CATEGORIES = ("Cloud", "Travel", "Rent", "Ads", "Hardware", "Training")
DEPARTMENTS = ("Sales", "Legal", "Design", "Support", "Research", "Finance")
SKUS = tuple(f"S{n}" for n in range(10, 34))
RECRUITERS = ("Ada", "Ben", "Cleo", "Dev", "Eva", "Finn", "Gia", "Hugo")
ROLES = ("Analyst", "Engineer", "Manager", "Counsel", "Designer")
HOLDERS = ("Founders", "Angels", "Seed", "Series", "Pool", "Advisors")
STATUSES = ("Settled", "Pending")


@dataclass(frozen=True)
class Scale:
    """Sizes of one scale: (low, high) ranges are inclusive counts of rows.

    idle_columns: source sheets have further columns that no question needs.
    """

    name: str
    months: int
    orders: tuple[int, int]
    lines_per_order: int
    customers: int
    regions: int
    contracts: tuple[int, int]
    currencies: int
    invoices: tuple[int, int]
    ledger: tuple[int, int]
    vendors: int
    departments: int
    decoys: int
    decoy_rows: tuple[int, int]
    idle_columns: bool
    first_id: int


SCALES = {
    "tiny": Scale(
        "tiny", 6, (8, 12), 2, 5, 3, (10, 16), 2, (8, 11), (12, 20), 6, 3, 2, (8, 12), False, 101
    ),
    "standard": Scale(
        "standard", 12, (320, 400), 3, 24, 5, (180, 240), 4, (200, 260), (520, 680), 40, 6,
        4, (720, 900), True, 1001,
    ),
}  # fmt: skip
