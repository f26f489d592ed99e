"""Every framework that Penstock is used with, driven against a fake provider whose invoice is the judge."""
