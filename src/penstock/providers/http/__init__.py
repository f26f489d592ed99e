"""A model call as it goes over HTTP: what is asked, what is answered, and the door between the two."""
