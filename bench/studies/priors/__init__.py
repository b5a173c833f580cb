"""The tables that ship with Headway: measured on a GPU, judged at held-out points, and written as files of the package."""
