"""The live view of a POD: what is seen (`sighting`), kept (`recordings`), arranged (`arrangement`) and shown
(`screen`)."""
