"""How well `headway plan` predicts: its times beside those in bench/results, and beside a GPU's that is here."""
