"""Many trainings on one folder of labels, and which settings do best on development texts."""
