"""MMLU's 57 subjects in its 17 subcategories and 4 categories, as `categories.py` of hendrycks/test has them."""

SUBCATEGORIES = {
    "physics": ("astronomy", "college_physics", "conceptual_physics", "high_school_physics"),
    "chemistry": ("college_chemistry", "high_school_chemistry"),
    "biology": ("college_biology", "high_school_biology"),
    "computer science": (
        "college_computer_science",
        "computer_security",
        "high_school_computer_science",
        "machine_learning",
    ),
    "math": (
        "abstract_algebra",
        "college_mathematics",
        "elementary_mathematics",
        "high_school_mathematics",
        "high_school_statistics",
    ),
    "engineering": ("electrical_engineering",),
    "history": ("high_school_european_history", "high_school_us_history", "high_school_world_history", "prehistory"),
    "philosophy": (
        "formal_logic",
        "logical_fallacies",
        "moral_disputes",
        "moral_scenarios",
        "philosophy",
        "world_religions",
    ),
    "law": ("international_law", "jurisprudence", "professional_law"),
    "politics": (
        "high_school_government_and_politics",
        "public_relations",
        "security_studies",
        "us_foreign_policy",
    ),
    "culture": ("human_sexuality", "sociology"),
    "economics": ("econometrics", "high_school_macroeconomics", "high_school_microeconomics"),
    "geography": ("high_school_geography",),
    "psychology": ("high_school_psychology", "professional_psychology"),
    "other": ("global_facts", "miscellaneous", "professional_accounting"),
    "business": ("business_ethics", "management", "marketing"),
    "health": (
        "anatomy",
        "clinical_knowledge",
        "college_medicine",
        "human_aging",
        "medical_genetics",
        "nutrition",
        "professional_medicine",
        "virology",
    ),
}
CATEGORIES = {
    "STEM": ("physics", "chemistry", "biology", "computer science", "math", "engineering"),
    "humanities": ("history", "philosophy", "law"),
    "social sciences": ("politics", "culture", "economics", "geography", "psychology"),
    "other": ("other", "business", "health"),
}
CATEGORY_OF = {
    subject: category
    for category, subcategories in CATEGORIES.items()
    for subcategory in subcategories
    for subject in SUBCATEGORIES[subcategory]
}
