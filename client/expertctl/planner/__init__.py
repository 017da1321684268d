"""From expert load and unequal servers to a placement: what `expertctl plan` does.

problem    loads, speeds, room and labels as arrays; held [L, S, E]: what a plan is
pack       a plan from nothing: copies of hot experts, and the heaviest first to the server that is done soonest
improve    a better plan by few moves from the one that is there
forecast   what each server would have to do, where clients choose among replicas
plan       which of these, and how many moves it takes
observe    what servers hold, their room, speed and load, over the network
picture    for people
"""
