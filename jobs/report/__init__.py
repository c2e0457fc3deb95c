"""HTML pages about runs, rendered from their records and readable without a network.

charts.py                                          templates/*.json, filled in: charts in Vega-Lite
run_page.py, curves.py, comparison.py, costs.py    records -> the content of a page
sweep_page.py, dashboard.py                        the page of a sweep, and of all runs of a stage
acceptance.py                                      the page of an acceptance run
rendering.py                                       content, templates/*.html, style.css, *.js and Vega -> one file
"""
