"""Drawn scenes: images whose every pixel is explained, and the words for them.

shapes        coloured shapes on plain grounds, as demo-mmdit knows them
sprites       drawings of things with a name: cats, pizzas, cars, each in several hands
make_sprites  the script that renders them from free emoji sets
grounds       what scenes of sprites stand on: grass, a beach, the night, plain colours
emoji         scenes of sprites, with the truth of every pixel
wording       the ways to say such a scene, and what is mistaken for it
"""
